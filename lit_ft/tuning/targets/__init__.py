"""What of a model a tuning method reaches: linear layers, experts, routers."""
