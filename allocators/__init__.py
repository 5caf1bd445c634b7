"""Page allocators and the memory they stand on."""
