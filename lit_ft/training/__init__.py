"""LightningModule with its loss and metrics, optimizers, loggers, and checks during a run."""
