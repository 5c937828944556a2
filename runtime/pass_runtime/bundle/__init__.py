"""What a bundle is, as data: manifest, window layouts, noise, sampling, and which buffer feeds which tensor."""
