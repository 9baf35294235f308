"""Detect CI by the environment variables that CI services set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

CI_VARIABLES: Final = (
    "CI",
    "BUILD_NUMBER",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "TF_BUILD",
    "JENKINS_URL",
    "TEAMCITY_VERSION",
    "CIRCLECI",
    "BUILDKITE",
    "TRAVIS",
)


def ci_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """
    Return the environment variable that identifies CI.

    Returns:
        Its name, or None. Empty, `0` and `false` count as not set.
    """
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            return name
    return None
