"""Files of options: TOML or JSON whose keys are the fields of a command's dataclass."""

import json
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from specsim.cli.option_fields import changed, common, option_fields
from specsim.core.errors import InputError, require
from specsim.core.files import read_text, write_whole


@dataclass(frozen=True, kw_only=True)
class ConfigFiles:
    """Files of the options themselves, which every command with options has."""

    # Read options from this TOML file, or .json file; no other options may repeat its keys.
    config: Annotated[Path | None, common("Configuration", file="reads")] = None
    # Write the options that are not the defaults to this file, before the command runs.
    save_config: Annotated[Path | None, common("Configuration", file="writes")] = None


CONFIG_FIELDS = option_fields(ConfigFiles)


def read_config(path: Path, command: str, kind: type) -> dict[str, Any]:
    """Read the options of a command; InputError names the file, the key and what is allowed."""
    allowed = "a TOML file of options, or a .json file"
    text = read_text(path, "config", allowed)
    try:
        values = json.loads(text, object_pairs_hook=_unique) if _is_json(path) else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("config", str(path), f"{allowed} ({error})") from error
    require(isinstance(values, dict), "config", str(path), "a JSON object of options")
    options = option_fields(kind)
    for name in values:
        if name not in options:
            names = " or ".join(get_close_matches(name.replace("-", "_"), options))
            allowed = f"{names or 'an option'} of specsim {command}; --help-all lists all options"
            raise InputError(f"key in {path}", name, allowed)
    try:
        return {name: options[name].read(value) for name, value in values.items()}
    except InputError as error:
        raise error.within(str(path)) from None


def write_config(path: Path, options: Any) -> None:
    """Write the options that are not the defaults, from which read_config makes the same value."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in changed(options).items()}
    if _is_json(path):
        text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InputError("save_config", str(path), f"options of UTF-8 text ({error.reason})") from error
    write_whole(path, data, "save_config")


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"the key {repeated[0]} is there twice")
    return dict(pairs)


def _toml(value: Any) -> str:
    """Write a value in TOML, whose texts are those of JSON but for DEL."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
