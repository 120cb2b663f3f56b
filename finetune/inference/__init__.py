"""Using a trained model: generate, chat, serve, score, evaluate, and questions to a live server."""
