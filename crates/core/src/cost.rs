//! What it costs to synchronise a fully connected layer (Poseidon 2017, Table 1), and nothing else.
//!
//! Costs count parameters that cross one node's network interface in one step, in both directions
//! together. They are `f64`s because a layer on a shard is a fraction of a layer.

/// What a layer's factors must save to be worth messages of their own: 16 KiB that a worker sends, and as many that it
/// receives, in parameters.
///
/// Whatever its size, a layer that goes by factors costs every worker a copy of its rows, a frame to and from every
/// other worker, and a matrix product and a step of its own; by parameter server it shares frames and steps with its
/// neighbours. The PyTorch plug-in takes 0.1 ms for that, in which 1 Gbit/s carries 12 KiB. A net of a hundred Linear
/// layers of 64 x 64 on 8 workers ("deep" in `bench/runs/2026-11-16-torch`) has steps of 150 ms: by factors it would
/// save no byte, and spend 10 ms of each on messages.
pub const MESSAGE: f64 = 2.0 * (16 << 10) as f64 / size_of::<f32>() as f64;

/// A fully connected layer and the cluster that trains it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// M: the layer's outputs.
    pub m: usize,
    /// N: its inputs.
    pub n: usize,
    /// K: samples per worker and step.
    pub batch: usize,
    /// P1.
    pub workers: usize,
    /// P2.
    pub servers: usize,
}

impl Setting {
    /// Parameter server, at a node that is only a server.
    pub fn ps_server(&self) -> f64 {
        2.0 * self.p1() * self.matrix() / self.p2()
    }

    /// Parameter server, at a node that is only a worker.
    pub fn ps_worker(&self) -> f64 {
        2.0 * self.matrix()
    }

    /// Parameter server, at a node that is both.
    pub fn ps_both(&self) -> f64 {
        2.0 * self.matrix() * (self.p1() + self.p2() - 2.0) / self.p2()
    }

    /// Sufficient factor broadcasting, at a worker. Servers have no part in it.
    pub fn sfb_worker(&self) -> f64 {
        2.0 * (self.p1() - 1.0) * self.factors()
    }

    /// Parameter server and factors at a port that carries `matrices` of the layer and `factors` of
    /// one worker each way.
    pub fn at_port(&self, matrices: f64, factors: f64) -> (f64, f64) {
        (2.0 * matrices * self.matrix(), 2.0 * factors * self.factors())
    }

    /// Adam: factors to the server, matrices back; at the server that holds the layer.
    pub fn adam_server(&self) -> f64 {
        self.p1() * self.matrix() + self.p1() * self.factors()
    }

    /// Adam, at a worker.
    pub fn adam_worker(&self) -> f64 {
        self.factors() + self.matrix()
    }

    /// Adam, at a node that is a worker and the server that holds the layer.
    pub fn adam_both(&self) -> f64 {
        (self.p1() - 1.0) * (self.matrix() + self.factors())
    }

    /// M·N.
    fn matrix(&self) -> f64 {
        self.m as f64 * self.n as f64
    }

    /// K·(M + N): one worker's factors.
    fn factors(&self) -> f64 {
        self.batch as f64 * (self.m as f64 + self.n as f64)
    }

    fn p1(&self) -> f64 {
        self.workers as f64
    }

    fn p2(&self) -> f64 {
        self.servers as f64
    }
}

/// Totals over the whole cluster as Poseidon 2015 §4.3 counts them.
pub mod total {
    use super::Setting;

    /// Full matrices through a parameter server: 2PMN.
    pub fn matrices(s: &Setting) -> f64 {
        2.0 * s.p1() * s.matrix()
    }

    /// Factors from every worker to every other: (P - 1)²K(M + N).
    pub fn broadcast(s: &Setting) -> f64 {
        (s.p1() - 1.0).powi(2) * s.factors()
    }

    /// Factors to the server, matrices back: PK(M + N) + PMN.
    pub fn adam(s: &Setting) -> f64 {
        s.p1() * (s.factors() + s.matrix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// VGG19's first fully connected layer, 4096 x 25088, on 8 nodes that are both (Poseidon 2017
    /// §5), K = 32: every cell of Table 1, worked out by hand.
    #[test]
    fn every_cell_of_table_1() {
        let s = Setting { m: 4096, n: 25088, batch: 32, workers: 8, servers: 8 };
        let matrix = 102_760_448.0;
        let factors = 933_888.0; // 32 · 29184
        assert_eq!(s.ps_server(), 205_520_896.0); // 2 · 8 · MN / 8
        assert_eq!(s.ps_worker(), 205_520_896.0); // 2 · MN
        assert_eq!(s.ps_both(), 359_661_568.0); // 2 · MN · 14 / 8
        assert_eq!(s.sfb_worker(), 13_074_432.0); // 2 · 7 · 933888
        assert_eq!(s.adam_server(), 8.0 * matrix + 8.0 * factors);
        assert_eq!(s.adam_worker(), 103_694_336.0);
        assert_eq!(s.adam_both(), 7.0 * 103_694_336.0);
    }

    /// Fewer servers than workers: the cells that depend on P2 grow, the others do not.
    #[test]
    fn servers_share_what_workers_send() {
        let s = Setting { m: 1000, n: 4096, batch: 64, workers: 6, servers: 2 };
        assert_eq!(s.ps_server(), 24_576_000.0); // 2 · 6 · 4096000 / 2
        assert_eq!(s.ps_worker(), 8_192_000.0);
        assert_eq!(s.ps_both(), 24_576_000.0); // 2 · 4096000 · 6 / 2
        assert_eq!(s.sfb_worker(), 3_261_440.0); // 2 · 5 · 64 · 5096
    }

    /// Poseidon 2015 §4.3: AlexNet's fc7 on 4 nodes with batch 256 takes 18.9M parameters by
    /// broadcast, 134.2M as matrices, 75.5M with Adam's scheme.
    #[test]
    fn alexnet_fc7_as_the_2015_paper_counts() {
        let s = Setting { m: 4096, n: 4096, batch: 256, workers: 4, servers: 4 };
        let millions = |x: f64| (x / 1e5).round() / 10.0;
        assert_eq!(millions(total::broadcast(&s)), 18.9);
        assert_eq!(millions(total::matrices(&s)), 134.2);
        assert_eq!(millions(total::adam(&s)), 75.5);
        assert_eq!((total::matrices(&s) / total::broadcast(&s) * 10.0).round() / 10.0, 7.1);
    }
}
