"""Detection of loss and gradient spikes."""
