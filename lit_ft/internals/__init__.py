"""Private API of other libraries, where they have no public one: one module per library."""
