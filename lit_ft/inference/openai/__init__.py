"""OpenAI's HTTP interface: requests read and checked, answers written, and the application that joins them."""
