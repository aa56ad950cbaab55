"""Loss and gradient spikes."""
