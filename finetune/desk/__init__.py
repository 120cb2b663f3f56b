"""What a person works with: commands, set-up, pages, diagnosis, clusters, the studio."""
