"""Files in rows: first their sizes and tokens; their content becomes features when they are trained on."""
