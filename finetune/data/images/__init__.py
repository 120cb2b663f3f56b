"""Images: from what a row says of one to its size and tokens, and, when it is trained on, to its pixels."""
