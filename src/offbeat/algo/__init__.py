"""The objectives as pure tensor mathematics: tensors and floats in, tensors or small values out."""
