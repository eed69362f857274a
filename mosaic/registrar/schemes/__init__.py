"""How matrices of weights are stored, a scheme per file, behind one `product`."""
