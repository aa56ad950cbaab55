"""GaLore: AdamW whose moments live in a low-rank projection of the gradient; needs the extra ``optimizers``."""

from collections.abc import Iterable
from typing import Any

from pytorch_optimizer import GaLore
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

from lit_ft.errors import RecipeError
from lit_ft.training.optimizers.configure import MATRICES


class GaLoreAdamW(GaLore):
    """``pytorch_optimizer.GaLore`` on the matrices of hidden layers, plain AdamW on all other weights.

    Zhao et al. 2024, arXiv:2403.03507. What is ours: which weights are projected, and a ``state_dict`` of tensors
    and numbers in place of Python objects, so that checkpoints load with ``weights_only``.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
    ) -> None:
        """Say which gradients are projected.

        Args:
            params: parameter groups, each with the key ``MATRICES``, as ``configure_optimizers`` makes them.
            lr: learning rate.
            betas: decay of the moments.
            weight_decay: decoupled weight decay.
            eps: added to the root of the second moment.
            rank: of the projected gradient; the moments of a matrix of m x n, m >= n, are m x rank.
            update_proj_gap: optimizer steps between two projections, each a singular value decomposition.
            scale: factor on the updates of projected weights.

        Raises:
            RecipeError: no group holds matrices.
        """
        projected = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "projection_type": "std"}
        groups = [{**group, **projected} if group[MATRICES] else group for group in params]
        if not any(group[MATRICES] for group in groups):
            raise RecipeError("GaLoreAdamW: no weight matrix of a hidden layer is trained; take torch.optim.AdamW")
        super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)

    def state_dict(self) -> dict[str, Any]:
        """Moments and projections as tensors."""
        saved = super().state_dict()
        saved["state"] = {
            index: {k: _plain(v) if isinstance(v, GaLoreProjector) else v for k, v in state.items()}
            for index, state in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read them back."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "projector" in state:
                    options = {name: group[name] for name in ("rank", "update_proj_gap", "scale", "projection_type")}
                    projector = GaLoreProjector(**options)
                    vars(projector).update(state["projector"])
                    state["projector"] = projector


def _plain(projector: GaLoreProjector) -> dict[str, Any]:
    return {"ortho_matrix": projector.ortho_matrix, "last_svd_step": projector.last_svd_step}
