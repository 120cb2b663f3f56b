"""Using a trained model: generate, chat, serve, score, evaluate, and comparison with a live server."""
