"""A page in the browser that starts runs as processes of their own and shows all runs of a folder (extra ``board``)."""
