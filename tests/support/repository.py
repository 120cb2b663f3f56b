"""The repository's root, once: tests and their helpers find files from it, wherever they lie themselves."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
