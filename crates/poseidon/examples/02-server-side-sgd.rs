//! Least squares, trained by the shards: SGD with momentum where the parameters live.
//!
//! Each worker has its own rows of one linear problem. It sends the gradient on them; the shards
//! average the gradients, take the step, and send back new parameters. The momentum exists once,
//! on the shards. At the end every worker holds the known solution, bit by bit the same.
//!
//! Run: cargo run -q -p poseidon-cli -- launch -n 3 -- cargo run -q -p poseidon --example 02-server-side-sgd

use poseidon::{Buffer, Config, Layer, Session};

const WEIGHTS: usize = 16;
const ROWS: usize = 256;
const STEPS: usize = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let session = Session::builder(Config::from_env()?)
        .layer(Layer::new("weights", WEIGHTS))
        .layer(Layer::new("weights of worker 0", WEIGHTS))
        .optimizer("sgd:momentum=0.9".parse()?)
        .learning_rate(0.2)
        .start()?;
    let layer = session.layer("weights")?;
    let rows = rows(session.rank());

    // The parameters begin as worker 0's, wherever the others would have begun.
    session.broadcast(layer, vec![f32::from(session.rank()); WEIGHTS].into())?;
    let mut weights = session.receive(layer)?.result;
    let (mut gradient, mut loss) = (Buffer::zeroed(WEIGHTS), 0.0);
    for step in 0..STEPS {
        // The rate goes out with the gradient. Workers with different schedules would be told so.
        session.set_learning_rate(if step < STEPS / 2 { 0.2 } else { 0.1 });
        loss = differentiate(&rows, &weights, &mut gradient);
        if step % 40 == 0 && session.rank() == 0 {
            println!("step {step:>3}  loss {loss:.2e}");
        }
        // Gradient out, parameters back: each in its own memory, both returned by receive.
        session.send_into(layer, gradient, weights)?;
        let received = session.receive(layer)?;
        weights = received.result;
        gradient = received.gradient.ok_or("the gradient's memory was not given back")?;
    }
    assert!(loss < 1e-6, "the loss ended at {loss}");
    let off = weights.iter().enumerate().map(|(i, w)| (w - solution(i)).abs());
    assert!(off.fold(0.0, f32::max) < 1e-3, "not the solution: {:?}", &weights[..]);

    // A broadcast gives everyone worker 0's values, to compare its own with.
    let other = session.layer("weights of worker 0")?;
    session.broadcast(other, weights.to_vec().into())?;
    assert_eq!(session.receive(other)?.result[..], weights[..], "replicas differ");
    println!("loss {loss:.2e}; the parameters are the solution, and worker 0's");
    Ok(session.finish()?)
}

/// The loss on `rows`, half the mean squared error. Its gradient replaces what is in `gradient`.
fn differentiate(rows: &[([f32; WEIGHTS], f32)], weights: &[f32], gradient: &mut [f32]) -> f32 {
    gradient.fill(0.0);
    let mut loss = 0.0;
    for (x, y) in rows {
        let error = x.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>() - y;
        loss += error * error / (2 * ROWS) as f32;
        gradient.iter_mut().zip(x).for_each(|(g, x)| *g += error * x / ROWS as f32);
    }
    loss
}

/// A worker's own rows: random numbers between -1 and 1, and what the solution makes of them.
fn rows(rank: u16) -> Vec<([f32; WEIGHTS], f32)> {
    let mut state = u32::from(rank) + 1;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let row = |_| std::array::from_fn(|_| random());
    let target = |x: [f32; WEIGHTS]| (0..WEIGHTS).map(|i| x[i] * solution(i)).sum();
    (0..ROWS).map(row).map(|x| (x, target(x))).collect()
}

fn solution(i: usize) -> f32 {
    i as f32 / 4.0 - 2.0
}
