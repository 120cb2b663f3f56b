"""Views of data and runs: `inspect`, `report`."""
