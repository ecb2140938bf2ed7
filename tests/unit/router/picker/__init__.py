"""Tests of the endpoint picker's policy and messages."""
