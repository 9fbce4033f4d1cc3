"""Pages of the API: one for each folder, and one for each operation with both implementations."""

import builtins
from collections.abc import Iterable, Mapping
from pathlib import Path

from specsim.maintain.site.docstrings import cell, code_cell, markdown, table
from specsim.maintain.site.links import SOURCE
from specsim.maintain.site.members import Class, Field, Function, Module, read_module

IMPLEMENTATIONS = ("reference", "fast")
FOLDERS = ("core", "models", "serving", "correctness", "simulator", "plots", "explorer", "training", "course")
_MOST_VALUE = 60  # characters of a default or constant that a table shows


def api_pages(root: Path) -> dict[str, str]:
    """Write every page, by its path in the site's source."""
    files = _modules(root)
    unlinked = {name: read_module(path) for name, path in files.items()}
    modules = {name: read_module(path, full_names(name, unlinked)) for name, path in files.items()}
    sources = {name: path.relative_to(root).as_posix() for name, path in files.items()}
    folders = [name for name in modules if sources[name].endswith("__init__.py")]
    pages = {_page(name): _folder_page(name, modules, sources) for name in folders}
    operations = sorted({operation for name in modules if (operation := _operation(name))})
    for operation in operations:
        page = _operation_page(operation, modules, sources)
        test = f"tests/operations/test_{operation}.py"
        if (root / test).is_file():
            page += f"## Tests\n\nSource: [`{test}`]({SOURCE}{test})\n"
        pages[f"api/operations/{operation}.md"] = page
    pages["api/operations/index.md"] = _operations_page(operations, modules)
    pages["api/specsim.md"] = _package_page(root, modules)
    pages["api/index.md"] = _index(modules)
    return pages


def _modules(root: Path) -> dict[str, Path]:
    """Find the files of public modules by the modules' names."""
    folders = {f"specsim.{name}": root / "specsim" / name for name in FOLDERS}
    folders |= {f"specsim.{name}": root / name for name in IMPLEMENTATIONS}
    found: dict[str, Path] = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            if not path.stem.startswith(("_", "test_", "conftest")) or path.stem == "__init__":
                found[name] = path
    return found


def full_names(module: str, modules: Mapping[str, Module]) -> dict[str, str]:
    """Give the full name of each public class that a module defines or imports, so that signatures link to it."""
    own = {each.name: module for each in modules[module].members if isinstance(each, Class)}
    own |= dict.fromkeys([each.name for each in modules[module].aliases], module)
    own |= dict.fromkeys(modules[module].type_variables, module)
    imported = modules[module].imported
    homes = {name: _home(name, origin, modules) for name, origin in imported.items()}
    # A class of another library keeps its own name, or Sphinx would link it to a class of that name here.
    homes |= {name: origin for name, origin in imported.items() if name[0].isupper() and not _is_own(origin)}
    return {name: f"{home}.{name}" for name, home in (homes | own).items() if home is not None}


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "specsim"


def _operation(module: str) -> str | None:
    """Name the operation that a module of an implementation carries out; None for other modules."""
    parts = module.split(".")
    is_file = len(parts) == 3 and parts[1] in IMPLEMENTATIONS
    return parts[2] if is_file and parts[2] not in _PARTS else None


# Folders inside the implementations.
_PARTS = ("drafters", "targets", "model", "persistent", "runtime", "verifiers", "vocabulary")


def _page(folder: str) -> str:
    parts = folder.split(".")[1:]
    return "/".join(("api", *parts)) + ".md"


def _summary(module: Module) -> str:
    paragraph = module.docstring.partition("\n\n")[0]
    return cell(paragraph)


def _folder_page(folder: str, modules: Mapping[str, Module], sources: Mapping[str, str]) -> str:
    """Write a folder's own docstring, its modules one after another, and links to the folders in it."""
    within = [each for each in modules if each.rpartition(".")[0] == folder and not _operation(each)]
    lines = [f"# `{folder}`", "", *_module(folder, modules, sources)]
    for name in within:
        if sources[name].endswith("__init__.py"):
            continue
        lines += [f"## `{name.rpartition('.')[2]}`", "", *_module(name, modules, sources)]
    folders = [each for each in within if sources[each].endswith("__init__.py")]
    if folders:
        rows = [(f"[`{each}`](/{_page(each)})", _summary(modules[each])) for each in folders]
        lines += ["## Folders", "", *table(("folder", "contents"), rows), ""]
        lines += _toctree(f"{each.rpartition('.')[2]} </{_page(each).removesuffix('.md')}>" for each in folders)
    return "\n".join(lines) + "\n"


def _toctree(entries: Iterable[str]) -> list[str]:
    return ["```{toctree}", ":hidden:", "", *entries, "```"]


def _operation_page(operation: str, modules: Mapping[str, Module], sources: Mapping[str, str]) -> str:
    lines = [f"# `{operation}`", ""]
    for implementation in IMPLEMENTATIONS:
        name = f"specsim.{implementation}.{operation}"
        if name in modules:
            lines += [f"## {implementation.capitalize()}", "", *_module(name, modules, sources)]
    return "\n".join(lines) + "\n"


def _operations_page(operations: list[str], modules: Mapping[str, Module]) -> str:
    rows = []
    for operation in operations:
        twins = [f"specsim.{each}.{operation}" for each in IMPLEMENTATIONS if f"specsim.{each}.{operation}" in modules]
        implementations = ", ".join(name.split(".")[1] for name in twins)
        rows.append((f"[`{operation}`]({operation}.md)", _summary(modules[twins[0]]), implementations))
    lines = [
        "# Operations of a round",
        "",
        "An operation has the same functions in both implementations, with the same arguments.",
        "",
        *table(("operation", "contents", "implemented in"), rows),
        "",
        *_toctree(operations),
    ]
    return "\n".join(lines) + "\n"


def _module(name: str, modules: Mapping[str, Module], sources: Mapping[str, str]) -> list[str]:
    """Write a module's docstring, constants, functions and classes."""
    module = modules[name]
    lines = [f"```{{py:module}} {name}", "```", "", markdown(module.docstring), ""]
    lines += [f"Source: [`{sources[name]}`]({SOURCE}{sources[name]})", ""]
    if sources[name].endswith("__init__.py"):
        lines += [*_exports(module.imported, modules), ""]
    if module.constants:
        lines += [*_fields_table("constant", module.constants), ""]
    for alias in module.aliases:
        lines += [f"```{{py:type}} {alias.name}", f":canonical: {alias.value}", "", cell(alias.comment), "```", ""]
    for member in module.members:
        lines += [*(_class(member) if isinstance(member, Class) else _function(member)), ""]
    return lines


def _exports(imported: Mapping[str, str], modules: Mapping[str, Module]) -> list[str]:
    """Write a table of the names that a folder imports from its modules, with links to their definitions."""
    rows: list[tuple[str, ...]] = []
    for name, module in imported.items():
        home = _home(name, module, modules)
        if home is not None and any(each.name == name for each in modules[home].members):
            rows.append(
                (f"{{py:obj}}`{name} <{home}.{name}>`", f"{{py:mod}}`{home}`", _first_line(modules[home], name))
            )
    return table(("name", "defined in", "description"), rows) if rows else []


def _home(name: str, module: str | None, modules: Mapping[str, Module]) -> str | None:
    """Find the public module that defines a name, through the modules that import it; None without one."""
    if module is None or module not in modules:
        return None
    defined = (*modules[module].members, *modules[module].aliases)
    if name in {each.name for each in defined}.union(modules[module].type_variables):
        return module
    origin = modules[module].imported.get(name)
    return None if origin == module else _home(name, origin, modules)


def _first_line(module: Module, name: str) -> str:
    """Give the first paragraph of a member's docstring."""
    docstrings = [each.docstring for each in module.members if each.name == name]
    return cell(docstrings[0].partition("\n\n")[0])


def _function(function: Function) -> list[str]:
    kind = {"classmethod": "method", "staticmethod": "method"}.get(function.kind, function.kind)
    lines = [f"`````{{py:{kind}}} {function.name}{'' if kind == 'property' else function.signature}"]
    if kind == "property" and function.signature:
        lines.append(f":type: {function.signature}")
    if kind != function.kind:
        lines.append(f":{function.kind}:")
    if kind == "property" and hasattr(builtins, function.name):  # Sphinx would link that type of signatures to it
        lines.append(":no-index:")
    lines += ["", *_kernel(function), markdown(function.docstring), "`````"]
    return lines


def _kernel(function: Function) -> list[str]:
    if "kernel" in function.decorators:
        return ["Triton kernel.", ""]
    return ["Triton device function.", ""] if "triton.jit" in function.decorators else []


def _class(each: Class) -> list[str]:
    lines = [f"```````{{py:class}} {each.name}{each.signature}", "", markdown(each.docstring), ""]
    if each.bases:
        lines += [f"Bases: {', '.join(map(code_cell, each.bases))}", ""]
    if each.fields:
        lines += [*_fields_table("field", each.fields), ""]
    for method in each.methods:
        lines += [*_function(method), ""]
    return [*lines, "```````"]


def _fields_table(what: str, fields: tuple[Field, ...]) -> list[str]:
    columns = [(what, [code_cell(each.name) for each in fields])]
    columns.append(("type", [code_cell(each.annotation) for each in fields]))
    columns.append(("default" if what == "field" else "value", [code_cell(_short(each.value)) for each in fields]))
    columns.append(("description", [cell(each.comment) for each in fields]))
    shown = [(heading, cells) for heading, cells in columns if any(cells)]
    rows = list(zip(*(cells for _, cells in shown), strict=True))
    return table(tuple(heading for heading, _ in shown), rows)


def _short(value: str) -> str:
    return value if len(value) <= _MOST_VALUE else value[:_MOST_VALUE] + "…"


def _package_page(root: Path, modules: Mapping[str, Module]) -> str:
    """Write the page of the names that `import specsim` gives."""
    imported = read_module(root / "specsim" / "__init__.pyi").imported
    text = ["# `specsim`", "", "Names that `import specsim` gives; each is loaded when it is first used.", ""]
    return "\n".join([*text, *_exports(imported, modules)]) + "\n"


def _index(modules: Mapping[str, Module]) -> str:
    folders = (*FOLDERS, *IMPLEMENTATIONS)
    rows = [("[`specsim`](specsim.md)", "the names that `import specsim` gives")]
    rows.append(("[Operations of a round](operations/index.md)", "functions of a round, reference and fast"))
    rows += [(f"[`specsim.{name}`]({name}.md)", _summary(modules[f"specsim.{name}"])) for name in folders]
    entries = ["specsim", "Operations <operations/index>", *(f"specsim.{name} <{name}>" for name in folders)]
    return "\n".join(["# Python API", "", *table(("folder", "contents"), rows), "", *_toctree(entries)]) + "\n"
