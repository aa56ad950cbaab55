"""Reset of what torch remembers about device meshes of an earlier world."""

from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def clear_mesh_caches() -> None:
    """Clear DTensor's caches; to be called before a new default process group is created.

    The keys are equal for meshes of equal shape, but the entries depend on the rank and name process groups. After
    ``destroy_process_group`` these names belong to other groups or to none.
    """
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
