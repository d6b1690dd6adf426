"""Packing strategies: UtK, CIP, NExtLong, PoSE, length upsampling. `packing/config.py` lists them."""
