"""What there is to see of data and runs: `inspect`, `report`."""
