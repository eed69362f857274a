"""Storage schemes of weight matrices, one per file, behind one `product`."""
