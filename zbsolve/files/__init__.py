"""Files: reading documents with one-line complaints, and writing atomically."""
