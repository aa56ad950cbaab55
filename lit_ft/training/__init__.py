"""The LightningModule with its loss and metrics, and what watches over a run."""
