"""Calibration: measured requests in, a profile out, and the profile's predictions beside what was measured."""
