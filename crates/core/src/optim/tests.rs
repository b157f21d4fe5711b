use super::*;

const LENGTHS: [usize; 6] = [0, 1, 15, 16, 17, 1000];
const STEPS: u64 = 50;

/// Every kernel, every flag, and decay and dampening where there are any.
fn steppers() -> Vec<Optimizer> {
    [
        "sgd",
        "sgd:weight-decay=0.01",
        "sgd:momentum=0.9",
        "sgd:momentum=0.9,dampening=0.25,weight-decay=0.01",
        "sgd:momentum=0.9,weight-decay=0.01,nesterov,reduction=sum",
        "caffe-sgd:weight-decay=0.01",
        "caffe-sgd:momentum=0.9,weight-decay=0.01",
        "caffe-sgd:momentum=0.9,weight-decay=0.01,nesterov",
        "adam",
        "adam:beta1=0.8,beta2=0.99,eps=1e-6,weight-decay=0.1,reduction=sum",
        "adam:beta1=0,beta2=0",
        "adamw",
        "adamw:weight-decay=0.5",
        "sgd:momentum=0.9,weight-decay=0.1,maximize",
        "adam:weight-decay=0.1,maximize",
        "adamw:maximize",
    ]
    .map(|text| text.parse().unwrap())
    .into()
}

/// A training run of `STEPS` steps, with its own parameters, gradients and rates.
struct Run {
    optimizer: Optimizer,
    workers: usize,
    parameters: Vec<f32>,
    state: Vec<Vec<f32>>,
}

impl Run {
    fn new(optimizer: &Optimizer, len: usize) -> Self {
        Self {
            optimizer: optimizer.clone(),
            workers: 3,
            parameters: noise(1, len),
            state: vec![vec![0.0; len]; optimizer.state_vectors()],
        }
    }

    fn step(&mut self, arch: Arch, t: u64) {
        let sum = noise(1 + t, self.parameters.len());
        self.optimizer.step_on(
            arch,
            Step {
                parameters: &mut self.parameters,
                sum: &sum,
                scale: self.optimizer.reduction().scale(self.workers),
                rate: rate(t),
                clock: Clock(t),
                state: state_of(&mut self.state),
            },
        );
    }

    fn finish(mut self, arch: Arch) -> Self {
        (1..=STEPS).for_each(|t| self.step(arch, t));
        self
    }

    fn bits(&self) -> Vec<u32> {
        self.state.iter().chain([&self.parameters]).flatten().map(|x| x.to_bits()).collect()
    }
}

/// Changes in every step, by powers of two and by others.
fn rate(t: u64) -> f32 {
    [0.1, 0.05, 0.03, 0.2][t as usize % 4] / (1 + t / 10) as f32
}

/// `len` numbers in [-1, 1), each a multiple of 2^-23: the same everywhere. xorshift64*
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::iter::repeat_with(|| {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        let top = x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        top as f32 / (1 << 23) as f32 - 1.0
    })
    .take(len)
    .collect()
}

/// One parameter by the textbook, in `f64`.
#[derive(Default)]
struct Reference {
    p: f64,
    first: f64,
    second: f64,
}

impl Reference {
    fn step(&mut self, optimizer: &Optimizer, t: u64, lr: f64, mean: f64, workers: f64) {
        let mut g = match optimizer.reduction() {
            Reduction::Mean => mean,
            Reduction::Sum => mean * workers,
        };
        if optimizer.to_string().contains("maximize") {
            g = -g;
        }
        match *optimizer {
            Optimizer::Reduce(_) => unreachable!(),
            Optimizer::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
                let (mu, tau) = (f64::from(momentum), f64::from(dampening));
                g += f64::from(weight_decay) * self.p;
                self.first = if t == 1 { g } else { mu * self.first + (1.0 - tau) * g };
                self.p -= lr * if nesterov { g + mu * self.first } else { self.first };
            }
            Optimizer::CaffeSgd { momentum, weight_decay, nesterov, .. } => {
                let mu = f64::from(momentum);
                g += f64::from(weight_decay) * self.p;
                let old = self.first;
                self.first = mu * old + lr * g;
                self.p -= if nesterov { (1.0 + mu) * self.first - mu * old } else { self.first };
            }
            Optimizer::Adam { beta1, beta2, eps, weight_decay, .. } => {
                g += f64::from(weight_decay) * self.p;
                self.adam(beta1, beta2, eps, t, lr, g);
            }
            Optimizer::AdamW { beta1, beta2, eps, weight_decay, .. } => {
                self.p -= lr * f64::from(weight_decay) * self.p;
                self.adam(beta1, beta2, eps, t, lr, g);
            }
        }
    }

    fn adam(&mut self, beta1: f64, beta2: f64, eps: f32, t: u64, lr: f64, g: f64) {
        self.first = beta1 * self.first + (1.0 - beta1) * g;
        self.second = beta2 * self.second + (1.0 - beta2) * g * g;
        let mean = self.first / (1.0 - beta1.powf(t as f64));
        let square = self.second / (1.0 - beta2.powf(t as f64));
        self.p -= lr * mean / (square.sqrt() + f64::from(eps));
    }
}

/// The tolerance is 32 units of 2^-24, relative to the larger of 1 and the parameter, which stays
/// near 1 here: each of 50 steps rounds the parameter once by at most half a unit of its last
/// place, and the update, at most a fifth of it, a few times more. The worst seen is 15 units.
#[test]
fn fifty_steps_follow_the_textbook() {
    const LEN: usize = 1000;
    let tolerance = 32.0 * 2f64.powi(-24);
    for optimizer in steppers() {
        let mut run = Run::new(&optimizer, LEN);
        let mut references: Vec<_> = (run.parameters.iter())
            .map(|&p| Reference { p: p.into(), ..Default::default() })
            .collect();
        for t in 1..=STEPS {
            run.step(Arch::new(), t);
            for (reference, sum) in references.iter_mut().zip(noise(1 + t, LEN)) {
                let workers = run.workers as f64;
                let mean = f64::from(sum) / workers;
                reference.step(&optimizer, t, rate(t).into(), mean, workers);
            }
            for (i, (&p, reference)) in run.parameters.iter().zip(&references).enumerate() {
                let error = (f64::from(p) - reference.p).abs() / reference.p.abs().max(1.0);
                assert!(
                    error <= tolerance,
                    "{optimizer}, step {t}, element {i}: {p} instead of {}",
                    reference.p
                );
            }
        }
    }
}

#[test]
fn instruction_sets_agree_to_the_bit() {
    for optimizer in steppers() {
        for len in LENGTHS {
            let best = Run::new(&optimizer, len).finish(Arch::new());
            let plain = Run::new(&optimizer, len).finish(Arch::Scalar);
            assert_eq!(best.bits(), plain.bits(), "{optimizer}, {len} elements");
        }
    }
}

/// Digests of one run, which every machine must reproduce, whatever its processor is.
#[test]
fn machines_agree_to_the_bit() {
    let digests = [
        0x35f4_1162_0982_2034,
        0xdeaf_9151_fcec_0572,
        0x1a8c_6a16_7881_3174,
        0xec3f_023e_ba19_5ca2,
        0x86c5_669a_6bad_ba8c,
        0xdeaf_9151_fcec_0572,
        0xfb20_17ed_a825_437a,
        0xc5e7_3231_1256_c243,
        0x7999_cd04_f197_4f14,
        0xe8ac_e774_cf4c_61cd,
        0x8f67_09be_8f19_ff62,
        0x3735_6011_1f8b_abbd,
        0x5a71_66a6_2d48_4485,
    ];
    for (optimizer, expected) in steppers().iter().zip(digests) {
        let run = Run::new(optimizer, 1000).finish(Arch::new());
        // FNV-1a over the words.
        let digest = run.bits().iter().fold(0xcbf2_9ce4_8422_2325_u64, |digest, &word| {
            (digest ^ u64::from(word)).wrapping_mul(0x100_0000_01b3)
        });
        assert_eq!(digest, expected, "{optimizer}: {digest:#018x}");
    }
}

/// A parameter's value must not depend on where the plan cuts chunks.
#[test]
fn chunks_of_any_length_give_the_same_parameters() {
    for optimizer in steppers() {
        for len in LENGTHS {
            let mut whole = Run::new(&optimizer, len);
            let mut cut = Run::new(&optimizer, len);
            for t in 1..=3 {
                whole.step(Arch::new(), t);
                for (i, sum) in noise(1 + t, len).into_iter().enumerate() {
                    let mut state: Vec<_> = cut.state.iter().map(|v| vec![v[i]]).collect();
                    optimizer.step(Step {
                        parameters: &mut cut.parameters[i..=i],
                        sum: &[sum],
                        scale: optimizer.reduction().scale(cut.workers),
                        rate: rate(t),
                        clock: Clock(t),
                        state: state_of(&mut state),
                    });
                    for (vector, element) in cut.state.iter_mut().zip(state) {
                        vector[i] = element[0];
                    }
                }
                assert_eq!(whole.bits(), cut.bits(), "{optimizer}, {len} elements, step {t}");
            }
        }
    }
}

/// Two steps from 1 with gradients 1/2 and 1/4: the parameter after each.
fn two_steps(text: &str, rates: [f32; 2]) -> [f32; 2] {
    let optimizer: Optimizer = text.parse().unwrap();
    let mut parameters = [1.0];
    let mut state = vec![vec![0.0]; optimizer.state_vectors()];
    [(1, 0.5), (2, 0.25)].map(|(clock, gradient)| {
        optimizer.step(Step {
            parameters: &mut parameters,
            sum: &[4.0 * gradient],
            scale: Reduction::Mean.scale(4),
            rate: rates[clock as usize - 1],
            clock: Clock(clock),
            state: state_of(&mut state),
        });
        parameters[0]
    })
}

#[test]
fn torch_and_caffe_differ_when_the_rate_changes() {
    // Computed by hand; every number is a small binary fraction, so the results are exact.
    let halved = [0.5, 0.25];
    // buf 1/2, then 1/2·1/2 + 1/4 = 1/2, of which the new rate takes 1/8.
    assert_eq!(two_steps("sgd:momentum=0.5", halved), [0.75, 0.625]);
    // 1/2 + 1/2·1/2 = 3/4 at rate 1/2, then 1/4 + 1/2·1/2 = 1/2 at rate 1/4.
    assert_eq!(two_steps("sgd:momentum=0.5,nesterov", halved), [0.625, 0.5]);
    // v 1/4, then 1/2·1/4 + 1/4·1/4 = 3/16: the first gradient still acts at the first rate.
    assert_eq!(two_steps("caffe-sgd:momentum=0.5", halved), [0.75, 0.5625]);
    // 3/2·1/4, then 3/2·3/16 - 1/2·1/4 = 5/32.
    assert_eq!(two_steps("caffe-sgd:momentum=0.5,nesterov", halved), [0.625, 0.46875]);

    let constant = [0.5, 0.5];
    assert_eq!(two_steps("sgd:momentum=0.5", constant), [0.75, 0.5]);
    assert_eq!(two_steps("caffe-sgd:momentum=0.5", constant), [0.75, 0.5]);
    assert_eq!(two_steps("sgd:momentum=0.5,nesterov", constant), [0.625, 0.375]);
    assert_eq!(two_steps("caffe-sgd:momentum=0.5,nesterov", constant), [0.625, 0.375]);
}

#[test]
fn dampening_spares_the_first_step() {
    // buf 1/2, then 1/2·1/2 + 1/2·1/4 = 3/8.
    assert_eq!(two_steps("sgd:momentum=0.5,dampening=0.5", [0.5, 0.5]), [0.75, 0.5625]);
}

#[test]
fn adams_first_step_has_the_size_of_the_rate() {
    // Whatever the gradient: m̂ / √v̂ is its sign.
    let [first, _] = two_steps("adam", [0.25, 0.25]);
    assert!((first - 0.75).abs() < 1e-6, "{first}");
    let [first, _] = two_steps("adamw:weight-decay=0.5", [0.25, 0.25]);
    assert!((first - (0.875 - 0.25)).abs() < 1e-6, "{first}");
}

#[test]
fn adam_leaves_parameters_without_gradient_alone() {
    let mut parameters = [0.5, -2.0];
    let mut state = vec![vec![0.0; 2]; 2];
    Optimizer::adam().step(Step {
        parameters: &mut parameters,
        sum: &[0.0; 2],
        scale: 1.0,
        rate: 0.1,
        clock: Clock(1),
        state: state_of(&mut state),
    });
    assert_eq!(parameters, [0.5, -2.0]);
}

#[test]
fn add_and_scale_touch_every_element() {
    for len in LENGTHS {
        let (a, b) = (noise(7, len), noise(8, len));
        let mut x = a.clone();
        add(&mut x, &b);
        assert!(x.iter().zip(a.iter().zip(&b)).all(|(x, (a, b))| *x == a + b), "add, {len}");
        let mut x = a.clone();
        scale(&mut x, 0.3);
        assert!(x.iter().zip(&a).all(|(x, a)| *x == a * 0.3), "scale, {len}");
    }
}

#[test]
fn state_is_counted() {
    let counts: Vec<_> = steppers().iter().map(Optimizer::state_vectors).collect();
    assert_eq!(counts, [0, 0, 1, 1, 1, 0, 1, 1, 2, 2, 2, 2, 2, 1, 2, 2]);
    assert!(steppers().iter().all(|optimizer| !optimizer.is_stateless()));
    assert!(Optimizer::default().is_stateless());
    assert_eq!(Optimizer::default().state_vectors(), 0);
    assert_eq!(Optimizer::Reduce(Reduction::Sum).reduction(), Reduction::Sum);
    assert_eq!(Reduction::Mean.scale(8), 0.125);
    assert_eq!(Reduction::Sum.scale(8), 1.0);
}

#[test]
fn powers_are_right() {
    assert_eq!(power(0.0, 1), 0.0);
    assert_eq!(power(0.5, 10), 2f64.powi(-10));
    assert_eq!(power(0.9, u64::MAX), 0.0);
    let expected = (1_000_000.0 * 0.999999f64.ln()).exp();
    assert!((power(0.999999, 1_000_000) / expected - 1.0).abs() < 1e-9);
}

#[test]
fn invalid_numbers_are_refused() {
    let sgd = |momentum, dampening, weight_decay, nesterov| Optimizer::Sgd {
        momentum,
        dampening,
        weight_decay,
        nesterov,
        maximize: false,
        reduction: Reduction::Mean,
    };
    let caffe = |momentum, weight_decay, nesterov| Optimizer::CaffeSgd {
        momentum,
        weight_decay,
        nesterov,
        reduction: Reduction::Mean,
    };
    let adam = |beta1, beta2, eps, weight_decay| Optimizer::Adam {
        beta1,
        beta2,
        eps,
        weight_decay,
        maximize: false,
        reduction: Reduction::Mean,
    };
    let adamw = |beta1, beta2, eps, weight_decay| Optimizer::AdamW {
        beta1,
        beta2,
        eps,
        weight_decay,
        maximize: false,
        reduction: Reduction::Mean,
    };
    let cases = [
        (sgd(-0.9, 0.0, 0.0, false), "sgd: momentum must be a finite number >= 0, got -0.9"),
        (sgd(f32::NAN, 0.0, 0.0, false), "sgd: momentum must be a finite number >= 0, got NaN"),
        (sgd(0.9, f32::INFINITY, 0.0, false), "sgd: dampening must be a finite number, got inf"),
        (sgd(0.9, 0.0, -1.0, false), "sgd: weight-decay must be a finite number >= 0, got -1"),
        (sgd(0.0, 0.0, 0.0, true), "sgd: momentum must be > 0 with nesterov, got 0"),
        (sgd(0.9, 0.1, 0.0, true), "sgd: dampening must be 0 with nesterov, got 0.1"),
        (
            caffe(f32::INFINITY, 0.0, false),
            "caffe-sgd: momentum must be a finite number >= 0, got inf",
        ),
        (
            caffe(0.9, f32::NAN, false),
            "caffe-sgd: weight-decay must be a finite number >= 0, got NaN",
        ),
        (caffe(0.0, 0.0, true), "caffe-sgd: momentum must be > 0 with nesterov, got 0"),
        (adam(1.0, 0.999, 1e-8, 0.0), "adam: beta1 must be at least 0 and below 1, got 1"),
        (adam(0.9, -0.1, 1e-8, 0.0), "adam: beta2 must be at least 0 and below 1, got -0.1"),
        (adam(0.9, f64::NAN, 1e-8, 0.0), "adam: beta2 must be at least 0 and below 1, got NaN"),
        (adam(0.9, 0.999, 0.0, 0.0), "adam: eps must be a finite number > 0, got 0"),
        (
            adamw(0.9, 0.999, 1e-8, -0.5),
            "adamw: weight-decay must be a finite number >= 0, got -0.5",
        ),
    ];
    for (optimizer, message) in cases {
        assert_eq!(optimizer.validate().unwrap_err().to_string(), message);
    }
    for optimizer in steppers() {
        assert_eq!(optimizer.validate(), Ok(()), "{optimizer}");
    }
}

#[test]
#[should_panic = "as long as the sum"]
fn adding_unlike_lengths_panics() {
    add(&mut [0.0; 2], &[0.0; 3]);
}

#[test]
#[should_panic = "stateless"]
fn stepping_a_reduction_panics() {
    Run::new(&Optimizer::default(), 1).step(Arch::new(), 1);
}

#[test]
#[should_panic = "keeps 2 state vectors of 1 elements, the chunk has [1, 0]"]
fn missing_state_panics() {
    let mut run = Run::new(&Optimizer::adam(), 1);
    run.state.pop();
    run.step(Arch::new(), 1);
}

#[test]
#[should_panic = "first step has clock 1"]
fn stepping_at_clock_0_panics() {
    Run::new(&Optimizer::adam(), 1).step(Arch::new(), 0);
}
