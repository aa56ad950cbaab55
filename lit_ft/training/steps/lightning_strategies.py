"""Lightning's strategies that split weights, which do not train what one process trains."""

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lit_ft.errors import RecipeError

_REFUSED: dict[type[Strategy], str] = {
    FSDPStrategy: "each rank would clip gradients by the norm of its own shard",
    DeepSpeedStrategy: "gradient norms would be logged as 0, and micro-batches without samples would change the step",
    ModelParallelStrategy: "it leaves it to a model to distribute itself, and ranks would train apart from each other",
}


def check_lightning_strategy(kind: type[Strategy]) -> None:
    """Refuse Lightning's own classes, but not those that inherit from them, as those of ``lit_ft.strategies`` do.

    Raises:
        RecipeError: the strategy is one of them; the message names ours.
    """
    if (why := _REFUSED.get(kind)) is not None:
        name = kind.__name__
        raise RecipeError(f"trainer.strategy: {name} is Lightning's own: {why}; take lit_ft.strategies.{name}")
