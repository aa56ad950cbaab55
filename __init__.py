"""What ``import lit_ft`` finds beside a clone that is named lit_ft: the package within the clone.

Without this file Python takes the clone's folder for an empty namespace package, even where lit_ft is installed with
``pip install -e``, whose finder comes last.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "lit_ft":
    _repository = Path(__file__).resolve().parent
    if find_spec("lit_callbacks") is None:  # not installed
        sys.path.append(str(_repository / "callbacks"))
    _package = _repository / "lit_ft"
    _spec = spec_from_file_location(__name__, _package / "__init__.py", submodule_search_locations=[str(_package)])
    assert _spec is not None
    assert _spec.loader is not None
    # The import system returns what is in sys.modules at the end.
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
