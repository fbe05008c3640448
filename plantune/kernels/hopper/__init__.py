"""Convolutions by tensor copies and warpgroup products: tiles, designs, launches."""
