//! Profiles of devices on which nothing was measured, from those of a device on which it was.
//!
//! A layer's time there has a part in which it computes: its FLOPs at the rate of that device's matrix
//! products, at most the whole of the time. Here the layer takes the longer of two times: that part,
//! by the ratio of the devices' published FLOPs per second; or the whole, by the ratio of their
//! published memory bandwidths.

use super::{LayerTime, PROFILES, Profile, Rates};
use crate::zoo::{self, Model};

/// How times of one device become those of another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// FLOPs per second of matrix products, as measured on the one.
    products: f64,
    /// How many times as many FLOPs per second the one has, as published.
    computing: f64,
    /// How many times as many bytes per second the memory of the one carries, as published.
    memory: f64,
}

impl Profile {
    /// The built-in profile that this one is scaled from, with its name.
    pub(super) fn base(&self) -> Option<(&'static str, Profile)> {
        let wanted = zoo::folded(self.scaled_from.as_ref()?);
        let (name, _) = PROFILES.iter().find(|(known, _)| zoo::folded(known) == wanted)?;
        Some((name, Profile::named(name).ok()?))
    }

    /// The rates of a profile that is scaled, or why there are none.
    pub(super) fn scaled_rates(&self) -> Result<Rates, String> {
        let Some((from, base)) = self.base() else {
            return Err("`scaled_from` names no built-in profile".into());
        };
        if !self.measured.is_empty() || !self.throughput.is_empty() {
            return Err("a profile with `scaled_from` has no times of its own".into());
        }
        let scale = Scale::between(&base, self).map_err(|why| format!("{why} ({from})"))?;
        let rates = base.rates.ok_or("`scaled_from` names a profile without `rates`")?;
        // What one FLOP takes.
        let scaled = |rate: f64| 1.0 / scale.seconds(1.0 / rate, 1.0);
        let Rates { conv, fc, other, fc_rows } = rates;
        Ok(Rates { conv: scaled(conv), fc: scaled(fc), other: scaled(other), fc_rows })
    }
}

impl Scale {
    pub(super) fn between(from: &Profile, to: &Profile) -> Result<Self, &'static str> {
        let there =
            from.published.as_ref().ok_or("`scaled_from` names a profile without figures")?;
        let here = to.published.as_ref().ok_or("`scaled_from` needs `published`")?;
        let products = from.rates.ok_or("`scaled_from` names a profile without `rates`")?.fc;
        let (computing, memory) = (there.flops / here.flops, there.memory / here.memory);
        Ok(Self { products, computing, memory })
    }

    /// Of `times`, those of `model`'s layers for a batch on the one device.
    pub(super) fn times(&self, times: &[LayerTime], model: &Model, batch: usize) -> Vec<LayerTime> {
        let layers = times.iter().zip(&model.layers);
        let time = |(time, layer): (&LayerTime, &zoo::ModelLayer)| LayerTime {
            forward: self.seconds(time.forward, layer.forward_flops * batch as f64),
            backward: self.seconds(time.backward, layer.backward_flops * batch as f64),
        };
        layers.map(time).collect()
    }

    /// How long what takes `seconds` on the one, for so many FLOPs, takes on the other.
    fn seconds(&self, seconds: f64, flops: f64) -> f64 {
        let computing = (flops / self.products).min(seconds);
        (computing * self.computing).max(seconds * self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Basis, names};

    /// `h200`'s times scaled to a device with these figures.
    fn scaled(flops: f64, memory: f64) -> Profile {
        let text = format!(
            "device = \"d\"\nscaled_from = \"H200\"\n\
             [published]\nflops = {flops:e}\nmemory = {memory:e}\nsource = \"s\"\n"
        );
        Profile::parse(&text, "p.toml").unwrap()
    }

    fn times(profile: &Profile, model: &str) -> Vec<LayerTime> {
        profile.times(&Model::named(model).unwrap(), 32).unwrap().0
    }

    #[test]
    fn a_device_with_the_same_figures_is_as_fast() {
        let h200 = Profile::named("h200").unwrap();
        let figures = h200.published.clone().unwrap();
        let same = scaled(figures.flops, figures.memory);
        for model in zoo::names() {
            assert_eq!(times(&same, model), times(&h200, model), "{model}");
        }
        let (ours, theirs) = (same.rates.unwrap(), h200.rates.unwrap());
        for (ours, theirs) in
            [(ours.conv, theirs.conv), (ours.fc, theirs.fc), (ours.other, theirs.other)]
        {
            assert!((ours / theirs - 1.0).abs() < 1e-9, "{ours} against {theirs}");
        }
    }

    /// Half the memory bandwidth: everything takes twice as long. A hundredth of the FLOPs: what
    /// computes takes up to a hundred times as long, and what has no FLOPs as long as before.
    #[test]
    fn the_slower_of_computing_and_memory_counts() {
        let scale = Scale { products: 1e12, computing: 100.0, memory: 2.0 };
        let cases = [(1.0, 0.0, 2.0), (1.0, 1e12, 100.0), (1.0, 9e12, 100.0), (1.0, 1e11, 10.0)];
        for (seconds, flops, expected) in cases {
            assert_eq!(scale.seconds(seconds, flops), expected, "{flops}");
        }
        let h200 = Profile::named("h200").unwrap();
        let figures = h200.published.clone().unwrap();
        let half = scaled(figures.flops, figures.memory / 2.0);
        for (half, whole) in times(&half, "vgg19").iter().zip(times(&h200, "vgg19")) {
            assert!((half.sum() - 2.0 * whole.sum()).abs() < 1e-12);
        }
    }

    #[test]
    fn profiles_from_published_figures_say_so_and_know_every_model() {
        let published = names().map(|name| Profile::named(name).unwrap());
        let published: Vec<_> = published.filter(|p| p.scaled_from.is_some()).collect();
        assert_eq!(published.len(), 5);
        let h200 = Profile::named("h200").unwrap();
        for profile in published {
            let name = &profile.name;
            assert!(
                profile.device.contains("published") && profile.device.contains("not measured")
            );
            assert!(profile.copies.is_some(), "{name}");
            assert!(profile.published.as_ref().unwrap().source.contains("NVIDIA"), "{name}");
            for model in zoo::names() {
                let model = Model::named(model).unwrap();
                let (ours, basis) = profile.times(&model, 32).unwrap();
                assert_eq!(basis, Basis::Published { from: "h200" });
                assert!(basis.to_string().contains("not measured"), "{basis}");
                let (theirs, _) = h200.times(&model, 32).unwrap();
                let slower = |(a, b): (&LayerTime, &LayerTime)| {
                    a.forward >= b.forward && a.backward >= b.backward
                };
                assert!(ours.iter().zip(&theirs).all(slower), "{name}, {}", model.name);
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let figures = "[published]\nflops = 1.0\nmemory = 1.0\nsource = \"s\"\n";
        let own = "[[measured]]\nmodel = \"m\"\nbatch = 1\nlayers = [[\"a\", 1.0, 1.0]]\n";
        let cases = [
            ("nothing", figures, "names no built-in profile"),
            ("h200", "", "needs `published`"),
            ("titan-x", figures, "without figures"),
            ("h200", &format!("{figures}{own}"), "no times of its own"),
            ("h200", "[published]\nflops = 0.0\nmemory = 1.0\nsource = \"s\"\n", "above 0"),
            ("h200", &format!("{figures}[copies]\nto_host = -1.0\nto_device = 1.0\n"), "above 0"),
            ("h200", &format!("{figures}[copies]\nto_host = 1.0\n"), "`to_device`"),
        ];
        for (from, rest, words) in cases {
            let text = format!("device = \"d\"\nscaled_from = \"{from}\"\n{rest}");
            let error = Profile::parse(&text, "p.toml").unwrap_err().to_string();
            assert!(error.contains(words), "'{words}' is not in: {error}");
        }
    }
}
