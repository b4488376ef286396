"""Tests, by what they need: unit, sim and oracle nothing; ray real actors; cluster several hosts; gpu a GPU."""
