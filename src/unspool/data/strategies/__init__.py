"""Packing strategies: UtK, CIP, NExtLong, PoSE, length upsampling."""
