"""Results of some operators that a second pass takes from the first one, in place of computing them again.

In place of torch's ``create_selective_checkpoint_contexts``, whose results are those of the model itself: one that the
model changes in place afterwards, as Gemma 3n does, was changed once more in the second pass, and gradients were wrong.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ft.gradient_norm import local
from lit_ft.internals.torch import OpOverload, changed_arguments, tree_leaves, tree_map

_Results = defaultdict[Callable[..., Any], deque[Any]]


def contexts(operators: Collection[OpOverload]) -> tuple["FirstPass", "SecondPass"]:
    """Contexts of the first pass, which keeps the operators' results, and of the second one, which takes them.

    Args:
        operators: operators that change no argument, and of which no result is a view of one.
    """
    results: _Results = defaultdict(deque)
    return FirstPass(frozenset(operators), results), SecondPass(results)


class _Pass(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether functions that torch.compile has compiled may be called within."""
        return True


class FirstPass(_Pass):
    """Context that keeps results, and copies one before an operator changes it in place."""

    def __init__(self, operators: frozenset[OpOverload], results: _Results) -> None:
        super().__init__()
        self._operators, self._results = operators, results

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operator."""
        kwargs = kwargs or {}
        if changed := {_memory(tensor) for tensor in changed_arguments(func, args, kwargs)}:
            self._copy_those_in(changed)
        output = func(*args, **kwargs)
        if func in self._operators:
            self._results[func].append(tree_map(_apart_from_graph, output))
        return output

    def _copy_those_in(self, changed: set[int]) -> None:
        for kept in self._results.values():
            for place, result in enumerate(kept):
                if any(_memory(tensor) in changed for tensor in _tensors(result)):
                    kept[place] = tree_map(lambda part: part.clone() if isinstance(part, Tensor) else part, result)


class SecondPass(_Pass):
    """Context that takes each result once, in the order in which they were kept."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take the result of an operator, or compute it."""
        if func in self._results:
            return self._results[func].popleft()
        return func(*args, **(kwargs or {}))


def _tensors(result: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    """Address of a tensor's memory, which its views share."""
    return local(tensor).untyped_storage().data_ptr()


def _apart_from_graph(part: object) -> object:
    # The model's own tensor would refer to the graph that holds it.
    return part.detach() if isinstance(part, Tensor) else part
