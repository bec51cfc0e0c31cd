"""What the data_prep commands do: read, clean, tokenize and pack text of any size."""
