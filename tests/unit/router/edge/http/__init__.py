"""Tests of the OpenAI HTTP API's parts."""
