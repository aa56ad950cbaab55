"""Data sources to text segments: file formats, conversations and chat templates."""
