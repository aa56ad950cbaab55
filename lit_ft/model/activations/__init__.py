"""Memory of activations between forward and backward pass: recomputation, or offload to host memory."""
