"""Decides what each step computes and when a request is finished. No torch."""
