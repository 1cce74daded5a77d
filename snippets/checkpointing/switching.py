"""Give one module object another class for a while, so that nothing of its library is patched.

The switched class is a subclass of the module's own. Two such switches on one module have to be undone in the
opposite order, a second one of the same kind makes no sense, and a copy would run the original's hooks: all
three are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class PolicyError(ValueError):
    """A policy that would do something else than it says, or cannot be put in or taken out now; the message says what to do."""


def switch_class(module: nn.Module, by: str, members: dict[str, Any]) -> tuple[type[nn.Module], Callable[[], None]]:
    """Make ``module`` an instance of a subclass of its own class with these members.

    Args:
        by: who does this, for messages and for ``covered_by``.
        members: methods of the subclass; they may use ``super(type, self)`` with the type returned.

    Returns:
        The subclass, and what restores the module (see ``restore``).

    Raises:
        PolicyError: a ``forward`` of the object's own would go before the class's.
    """
    base = type(module)
    if "forward" in module.__dict__:
        raise PolicyError(f"{by}: {base.__name__} has a forward of its own (a wrapper of another library); remove that first")

    def no_copies(self, protocol):
        raise TypeError(f"{base.__name__} under {by} can be neither copied nor pickled; call off() first, or save the state_dict")

    ours = type(base.__name__, (base,), {"__module__": base.__module__, "__reduce_ex__": no_copies, "_switched_by": by, **members})
    module.__class__ = ours
    return ours, functools.partial(restore, module, ours, base, by)


def restore(module: nn.Module, ours: type[nn.Module], base: type[nn.Module], by: str) -> None:
    """Make ``module`` a ``base`` again, if it still is one of ``ours``; else somebody below restored it already.

    Raises:
        PolicyError: the module was switched again since; nothing is changed then.
    """
    if type(module) is ours:
        module.__class__ = base
    elif isinstance(module, ours):
        raise PolicyError(f"{by}: {base.__name__} was switched by {covered_by([module])} since; call that one's off() first")


def covered_by(modules: Iterable[nn.Module]) -> str | None:
    """Who switched one of these modules last, if anybody did."""
    return next((by for m in modules if (by := getattr(type(m), "_switched_by", None))), None)
