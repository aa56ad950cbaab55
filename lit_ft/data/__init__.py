"""From files to rows: sources -> formats -> rendering -> samples -> batching -> text_data."""
