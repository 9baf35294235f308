"""Import the factory of a torch model, as `edgeq init pkg.mod:factory` names it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_edgeq.names import nearest

if TYPE_CHECKING:
    import torch

_LISTED = 10
"""Names of a module that are told where none is near."""


@dataclass(frozen=True, slots=True)
class Factory:
    """
    Something in a module that is, or makes, a torch model.

    Attributes:
        module: The module's name.
        path: Of the attribute, such as `Classifier` or `models.small`.
        target: The attribute.
    """

    module: str
    path: str
    target: Any

    @property
    def name(self) -> str:
        """The attribute that the module is asked for."""
        return self.path.partition(".")[0]

    @property
    def is_model(self) -> bool:
        """Whether it is the model itself, and is not called."""
        import torch

        return isinstance(self.target, torch.nn.Module)

    def build(self) -> tuple[torch.nn.Module, Any, bool]:
        """
        Return a model in eval mode.

        Raises:
            TypeError: It cannot be called without arguments, or makes something else.
            RuntimeError: It fails.
        """
        import torch

        made = self.target if self.is_model else self._called()
        if isinstance(made, torch.nn.Module):
            return made.eval(), None, False
        if isinstance(made, (tuple, list)) and len(made) == 2:
            model, inputs = made
            if isinstance(model, torch.nn.Module):
                return model.eval(), inputs, True
        raise TypeError(
            f"{self.path} of {self.module} gives {type(made).__name__}: expected a torch "
            "nn.Module, or a pair of one and its sample inputs"
        )

    def _called(self) -> Any:
        where = f"{self.path} of {self.module}"
        if not callable(self.target):
            raise TypeError(
                f"{where} is {type(self.target).__name__}: expected a function or a class that "
                "makes a torch nn.Module"
            )
        needed = [
            parameter.name
            for parameter in inspect.signature(self.target).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise TypeError(
                f"{where} needs the arguments {', '.join(needed)}: name a function that takes none "
                "and makes the model"
            )
        try:
            return self.target()
        except Exception as error:
            raise RuntimeError(f"{where} fails: {type(error).__name__}: {error}") from error


def load_factory(text: str) -> Factory:
    """
    Import what `pkg.mod:factory` names; modules of the working directory can be named, too.

    Raises:
        ValueError: No module or no attribute of this name; names the nearest.
        RuntimeError: The import fails.
    """
    module_name, separator, path = text.partition(":")
    if not (separator and module_name and path):
        raise ValueError(
            f"expected package.module:factory, such as my_model:Classifier, got {text!r}"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    target: Any = _imported(module_name)
    for part in path.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            told = nearest(part, names) or f"; it has {', '.join(names[:_LISTED]) or 'nothing'}"
            raise ValueError(f"{module_name} has no {part!r}{told}")
        target = getattr(target, part)
    return Factory(module_name, path, target)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != name and not name.startswith(f"{missing}."):
            raise RuntimeError(f"{name} cannot be imported: {error}") from error
        parent, _, last = missing.rpartition(".")
        raise ValueError(
            f"there is no module {missing!r}{nearest(last, _modules(parent))}; modules are looked "
            f"for in {Path.cwd()} and in what is installed"
        ) from None
    except Exception as error:
        raise RuntimeError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _modules(parent: str) -> list[str]:
    """Return the names of the modules of a package, or of those in the working directory."""
    folders = [str(Path.cwd())]
    if parent:
        folders = list(getattr(sys.modules.get(parent), "__path__", []))
    return [module.name for module in pkgutil.iter_modules(folders)]
