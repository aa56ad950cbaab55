"""Steps of the LightningModule besides training: validation and test, and what surrounds an optimizer step."""
