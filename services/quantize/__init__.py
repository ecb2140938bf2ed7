"""`tandem quantize`: a plain checkpoint written anew in fewer bits, in the format of compressed-tensors."""
