"""How the workflows of README and of the pages install packages."""

from __future__ import annotations

import shlex

import yaml

from tests.docs.blocks import PAGES, README, blocks


def workflow_installs() -> list[list[str]]:
    """Return the words of each call of pip that resolves, in a workflow of GitHub or GitLab."""
    found = []
    for page in [README, *sorted(PAGES.rglob("*.md"))]:
        for block in blocks(page):
            if block.language == "yaml":
                found += [shlex.split(line) for line in _scripts(yaml.safe_load(block.text))]
    return [words for words in found if "pip" in words and "--no-deps" not in words]


def _scripts(workflow: dict[str, object]) -> list[str]:
    """Return the shell lines: `run` of a step, or an item of `script`."""
    lines = []
    for key, value in workflow.items():
        if key == "run":
            lines.append(str(value))
        elif key == "script" and isinstance(value, list):
            lines += map(str, value)
        elif isinstance(value, dict):
            lines += _scripts(value)
        elif isinstance(value, list):
            lines += [line for each in value if isinstance(each, dict) for line in _scripts(each)]
    return lines
