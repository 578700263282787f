"""Other people's interfaces, one file each, each an optional extra."""
