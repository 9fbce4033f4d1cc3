"""Files of a release: one version everywhere, and workflows that call what the Makefile has."""

import re
from pathlib import Path

import pytest
import yaml

import specsim

ROOT = Path(__file__).parents[2]
YAML_FILES = [ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml", *sorted((ROOT / ".github").rglob("*.yml"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_files_can_be_read(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_citation_and_changelog_name_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "authors", "title"} <= set(citation)
    assert citation["version"] == specsim.__version__
    releases = re.findall(r"^## \[([\d.]+)\] - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == (citation["version"], citation["date-released"])


def test_ci_tests_the_python_versions_that_the_package_names():
    named = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named != []


def test_workflows_call_targets_of_the_makefile():
    steps = [step for path in (ROOT / ".github/workflows").iterdir() for step in runs(path)]
    made = {target for step in steps for target in re.findall(r"\bmake ([a-z]+)", step)}
    assert {"test", "newest", "lint", "types", "docs", "demo", "dist"} <= made <= TARGETS


def runs(path: Path) -> list[str]:
    """List the shell commands of a workflow."""
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_pre_commit_runs_what_is_installed():
    """Programs are those of .venv, and paths are those of the checkout."""
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        assert all((ROOT / each).exists() for each in arguments if "/" in each)
