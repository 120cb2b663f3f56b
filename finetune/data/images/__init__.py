"""Images of rows: first their sizes and tokens; their pixels when they are trained on."""
