"""Parts of a model that tuning methods adapt: linear layers, experts, routers."""
