"""Root mean square layer normalisation, alone and with the residual added first."""
